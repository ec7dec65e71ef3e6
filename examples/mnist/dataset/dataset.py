"""The dataset: each sample is an Instance whose field names are the parameters of the model's ``forward``."""

import torch
from torch.utils.data import Dataset

from trainwright.data import DistTensorData, Instance, datasets, transforms


class MnistDataSet(Dataset):
    def __init__(self, path, is_train):
        self.data = datasets.MNIST(
            root=path,
            train=is_train,
            transform=transforms.ToTensor(),
            download=True,
            source_url="https://oneflow-public.oss-cn-beijing.aliyuncs.com/datasets/mnist/MNIST/",
        )

    def __getitem__(self, idx):
        sample = Instance(
            inputs=DistTensorData(
                # A copy, because the dataset may share the image.
                self.data[idx][0].clone().detach()
            ),
            labels=DistTensorData(
                torch.tensor(self.data[idx][1], dtype=torch.int),
                placement_idx=-1,
            ),
        )
        return sample

    def __len__(self):
        return len(self.data)
