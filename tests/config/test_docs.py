"""conf/README.md is what tests/docs.py would write today, and says what a reader looks for."""

from __future__ import annotations

from framework.config.compose import CONF, leaves
from tests.docs import PAGE, combinations, comment, page


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "write it again: make docs"


def test_every_setting_and_every_choice_is_on_it() -> None:
    lines = PAGE.read_text().splitlines()
    for key, _, spec in leaves():
        [line] = [line for line in lines if line.startswith(f"| `{key}` |") and spec.metadata["tag"] in line]
        assert spec.metadata["doc"].replace("|", "/") in line
    for file in CONF.glob("*/*.yaml"):
        assert any(line.startswith(f"| `{file.stem}` |") for line in lines), file


def test_every_choice_says_what_it_is() -> None:
    for file in CONF.glob("*/*.yaml"):
        assert len(comment(file)) > 10, file


def test_the_table_of_combinations_is_the_contracts() -> None:
    """Written down by hand: half weights need stage 1, fp16 autocast needs stage 0, the rest is free."""
    halves, autocasts = ("bf16", "fp16"), ("bf16_autocast", "fp16_autocast")
    zeros = ["stage0", "stage1", "stage2", "stage3", "stage2_offload", "stage3_offload", "stage3_nvme"]
    expected = {("fp32", zero): "yes" for zero in zeros}
    for precision in halves:
        expected |= {(precision, zero): "half_weights_stage0" if zero == "stage0" else "yes" for zero in zeros}
    expected |= {("bf16_autocast", zero): "yes" for zero in zeros}
    expected |= {("fp16_autocast", zero): "yes" if zero == "stage0" else "fp16_autocast_stage" for zero in zeros}
    assert combinations(["fp32", *halves, *autocasts], zeros) == expected
