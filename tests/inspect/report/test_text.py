"""Text of the commands."""

from trainwright.inspect.report.text import counted, local_time, shown, size, table


def test_a_table_aligns_its_columns() -> None:
    assert table([["name", "loss"], ["a", "10.5"], ["long", "1"]], right={1}) == [
        "  name  loss",
        "  a     10.5",
        "  long     1",
    ]


def test_values_of_files_and_times() -> None:
    assert (size(None), size(999_960), size(1_000)) == ("?", "1.0 MB", "1.0 kB")
    assert counted(1, "file", "files") + counted(1200, "file", "files") == "1 file1,200 files"
    assert local_time(None) == "?"
    assert shown("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
