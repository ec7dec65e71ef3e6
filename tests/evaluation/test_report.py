import logging

from trainwright.evaluation import flatten_results_dict, print_csv_format


def test_nested_figures_get_names_with_slashes():
    assert flatten_results_dict({"val": {"a": 1, "deep": {"b": 2}}, "c": 3}) == {"val/a": 1, "val/deep/b": 2, "c": 3}
    assert flatten_results_dict({}) == {}


def test_figures_are_lines_to_copy(caplog):
    with caplog.at_level(logging.INFO, "trainwright"):
        print_csv_format({"Acc@1": 50.0, "note": "ok", "cifar": {"Acc@1": 12.34567, "by class": {"cat": 1}}})
    assert [record.getMessage() for record in caplog.records] == [
        "copypaste: Acc@1,note",
        "copypaste: 50.0000,ok",
        "copypaste: Task: cifar",
        "copypaste: Acc@1,by class/cat",
        "copypaste: 12.3457,1.0000",
    ]
