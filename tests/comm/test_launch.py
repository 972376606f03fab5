"""What a user sees of ranks that were started for them."""

from dlio.comm.launch import ErrorFilter

RULE = "-" * 74 + "\n"
BANNER = [RULE, "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n", RULE]


def _sort(lines: list[str]) -> list[str]:
    sorter = ErrorFilter()
    return [shown for line in lines for shown in sorter.feed(line)] + sorter.end()


def test_an_error_that_all_ranks_report_is_shown_once_without_banners() -> None:
    error = "dlio: error: x.jpg cannot be decoded\n"
    assert _sort([error, *BANNER, "\0" + error, *BANNER, "\0"]) == [error]
    assert _sort([*BANNER, error]) == [error]


def test_an_error_in_the_middle_of_a_banner_is_shown() -> None:
    error = "dlio: error: x.jpg cannot be decoded\n"
    assert _sort([*BANNER[:2], error, BANNER[2]]) == [error]


def test_banners_are_shown_when_no_rank_has_explained_itself() -> None:
    assert _sort(["Killed\n", *BANNER]) == ["Killed\n", *BANNER]


def test_other_blocks_between_rules_are_passed_on() -> None:
    block = [RULE, "There are not enough slots available\n", RULE]
    assert _sort([*block, "dlio: error: a\n"]) == [*block, "dlio: error: a\n"]
    assert _sort(block[:2]) == block[:2]
