"""Sections of vLLM's recurrent states: which runs of a rank's state ranks of other sizes have more or less of."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool_client.vllm.identity.state_sections import Section, sections_of
from tests.rigs.vllm.specs import MambaSpec

BRAIN, SINGLE = "torch.bfloat16", "torch.float32"


def runs_of(**fields: Any) -> list[tuple[tuple[int, ...], int]]:
    return [(section.offsets, section.run_bytes) for section in sections_of(MambaSpec(**fields))]


def test_a_delta_rules_projections_are_divided_each_by_itself() -> None:
    found = runs_of(mamba_type="gdn_attention", shapes=((3, 32), (4, 4, 6)), dtypes=(BRAIN, SINGLE))
    keys = (0, 16, 64, 80, 128, 144)  # of each of three steps, Q and K of 8 channels
    assert found == [(keys, 16), ((32, 96, 160), 32), ((192,), 4 * 4 * 6 * 4)]


def test_channels_before_steps_are_one_run_for_each_projection() -> None:
    found = runs_of(mamba_type="mamba2", shapes=((32, 3), (4, 4, 6)), dtypes=(BRAIN, BRAIN))
    assert found == [((0,), 16 * 6), ((16 * 6, 24 * 6), 8 * 6), ((32 * 6,), 4 * 4 * 6 * 2)]


def test_a_size_at_which_all_projections_are_equally_wide_has_the_sections_of_others() -> None:
    found = runs_of(mamba_type="gdn_attention", shapes=((2, 24), (2, 4, 4)), dtypes=(BRAIN, BRAIN))
    assert found == [((0, 16, 48, 64), 16), ((32, 80), 16), ((96,), 64)]


@pytest.mark.parametrize(("groups", "is_whole"), [(0, False), (1, True), (2, False)])
def test_one_group_of_b_and_c_is_on_every_rank(groups: int, is_whole: bool) -> None:
    spec = MambaSpec(mamba_type="mamba2", shapes=((3, 28), (4, 4, 6)), dtypes=(BRAIN, BRAIN))
    assert [section.is_whole for section in sections_of(spec, groups)] == [False, is_whole, False]


def test_two_groups_on_a_rank_are_not_one() -> None:
    spec = MambaSpec(mamba_type="mamba2", shapes=((3, 40), (4, 4, 6)), dtypes=(BRAIN, BRAIN))
    assert not any(section.is_whole for section in sections_of(spec, 1))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mamba_type": "mamba1", "shapes": ((3, 16), (16, 8)), "dtypes": (BRAIN, SINGLE)}, [32, 512]),
        ({"mamba_type": "linear_attention", "shapes": ((4, 8, 8),), "dtypes": (SINGLE,)}, [1024]),
        ({"mamba_type": "short_conv", "shapes": ((2, 16),), "dtypes": (BRAIN,)}, [32]),
    ],
    ids=lambda given: given["mamba_type"] if isinstance(given, dict) else "",
)
def test_each_kind_has_its_tensors(fields: dict[str, Any], expected: list[int]) -> None:
    assert [section.run_bytes for section in sections_of(MambaSpec(**fields))] == expected


def test_runs_fill_a_state_and_do_not_overlap() -> None:
    for kind in ("gdn_attention", "mamba2"):
        for shape in ((3, 56), (56, 3)):
            found = sections_of(MambaSpec(mamba_type=kind, shapes=(shape, (5, 4, 6)), dtypes=(BRAIN, SINGLE)))
            runs = sorted((offset, section.run_bytes) for section in found for offset in section.offsets)
            assert runs[0][0] == 0
            assert [begin + size for begin, size in runs] == [
                *(begin for begin, _ in runs[1:]),
                3 * 56 * 2 + 5 * 4 * 6 * 4,
            ]


def test_facts_name_what_the_size_does_not_change() -> None:
    whole = MambaSpec(mamba_type="gdn_attention", shapes=((3, 32), (4, 4, 6)), dtypes=(BRAIN, SINGLE))
    half = MambaSpec(mamba_type="gdn_attention", shapes=((3, 16), (2, 4, 6)), dtypes=(BRAIN, SINGLE))
    other = MambaSpec(mamba_type="gdn_attention", shapes=((16, 3), (2, 4, 6)), dtypes=(BRAIN, SINGLE))
    assert [section.facts for section in sections_of(whole)] == [section.facts for section in sections_of(half)]
    assert sections_of(half)[0].facts != sections_of(other)[0].facts
    for dtypes in (("torch.float16", SINGLE), (BRAIN, "torch.float64")):  # the first one has items of the same size
        alike = sections_of(replace(half, dtypes=dtypes))
        facts = [one.facts == two.facts for one, two in zip(alike, sections_of(half), strict=True)]
        assert facts == ([False, False, True] if dtypes[1] == SINGLE else [True, True, False])
    assert len({section.facts for section in sections_of(whole)}) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_type": "kda"},
        {"mamba_type": "gdn_attention", "shapes": ((3, 32),), "dtypes": (BRAIN,)},
        {"shapes": ((3, 32), (4, 4, 6), (4, 8)), "dtypes": (BRAIN, SINGLE, BRAIN)},  # with records of more
        {"shapes": ((3, 32), (4, 4, 6)), "dtypes": (BRAIN, "torch.complex64")},
        {"shapes": ((3, 32), (4, 4, 6)), "dtypes": (BRAIN,)},
        {"shapes": ((3, 16), (4, 4, 6)), "dtypes": (BRAIN, SINGLE)},  # nothing is left for Q and K
        {"shapes": ((3, 17), (2, 4, 6)), "dtypes": (BRAIN, SINGLE)},  # of Q and K one is wider
        {"shapes": ((3, 32), (4, 24)), "dtypes": (BRAIN, SINGLE)},
        {"shapes": ((16, 16), (2, 4, 6)), "dtypes": (BRAIN, SINGLE)},  # which axis is the steps?
        {"shapes": ((3, 2, 16), (2, 4, 6)), "dtypes": (BRAIN, SINGLE)},
        {"mamba_type": "mamba1", "shapes": ((3, 16), (15, 8)), "dtypes": (BRAIN, SINGLE)},
    ],
    ids=str,
)
def test_states_of_another_form_have_no_sections(fields: dict[str, Any]) -> None:
    assert sections_of(MambaSpec(**fields)) == ()


def test_a_state_that_every_rank_has_is_not_divided() -> None:
    spec = MambaSpec(shapes=((3, 32), (4, 4, 6)), dtypes=(BRAIN, SINGLE))
    assert all(isinstance(section, Section) for section in sections_of(spec))
    assert sections_of(spec)
    assert sections_of(replace(spec, tp_replicated=True)) == ()
