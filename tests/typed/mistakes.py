"""What type checkers have to refuse: a comment without an error on its line is an error itself."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trainwright
    from trainwright import Trainer, TrainingConfig
    from trainwright import Trainr as Other  # type: ignore[attr-defined]
    from trainwright.hooks import HookBase

    print(Other, trainwright.Trainr)  # type: ignore[attr-defined]
    print(trainwright.config.TrainingConfg)  # type: ignore[attr-defined]
    config = TrainingConfig(learnin_rate=1)  # type: ignore[call-arg]
    print(config.learnin_rate)  # type: ignore[attr-defined]
    TrainingConfig(lr="fast")  # type: ignore[arg-type]
    TrainingConfig(eval_strategy="sometimes")  # type: ignore[arg-type]
    trainer = Trainer(None, config)
    trainer.trian()  # type: ignore[attr-defined]
    trainer.train(10)  # type: ignore[arg-type]
    trainer.train(epochs=3)  # type: ignore[arg-type]
    trainer.predict()  # type: ignore[call-arg]

    class Hook(HookBase):
        def after_step(self, loss: float) -> None:  # type: ignore[override]
            print(loss)
