"""Methods as data: presets, overrides, validation, printing."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import hotrain
from hotrain.method import KNOBS, GradInput, GradWeight, Method, Saved
from hotrain.presets import DEFAULT, describe

NAMES = (
    "exact",
    "hot",
    "hot-unbiased",
    "hla",
    "hq",
    "hq8",
    "hq4",
    "hot-importance",
    "lbp-wht",
    "luq",
    "int4",
    "dropout",
)


def test_the_presets_are_these() -> None:
    assert set(hotrain.presets()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_a_value(name: str) -> None:
    """Equal when made twice, hashable (layouts and caches key on it), picklable (checkpoints, worker processes)."""
    method = hotrain.preset(name)
    assert method == hotrain.preset(name)
    assert hash(method) == hash(hotrain.preset(name))
    assert pickle.loads(pickle.dumps(method)) == method
    assert method.name == name
    with pytest.raises(FrozenInstanceError):
        method.name = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        method.grad_weight.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_in_one_short_line(name: str) -> None:
    text = str(hotrain.preset(name))
    assert text.startswith(name)
    assert "\n" not in text
    assert len(text) <= 90


def test_prints_say_what_differs() -> None:
    """Two methods that compute differently do not print alike: the conversion report shows nothing else."""
    texts = [str(hotrain.preset(name)).removeprefix(name) for name in NAMES]
    assert len(set(texts)) == len(texts)
    assert (
        str(hotrain.preset("hot-unbiased"))
        == "hot-unbiased  g_x:H16·int4/auto  g_w:P4+4of16·int8/column  saved:int8/tensor  number:auto"
    )


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("hot", "CVPR 2025"),
        ("hot-unbiased", "Ours"),
        ("hla", "EVMT-HLA"),
        ("hq", "Table 2"),
        ("hq8", "Ours"),
        ("hq4", "Ours"),
        ("hot-importance", "Ours"),
        ("lbp-wht", "NeurIPS 2023"),
        ("luq", "yTbNYYcopd"),
        ("int4", "Table 4"),
        ("dropout", "EVMT-HLA"),
    ],
)
def test_each_preset_cites_its_source(name: str, source: str) -> None:
    assert source in describe(name)


PATHS = [
    # (preset, grad_input bits, transform, tile, rank, sampled, grad_weight bits, saved bits): the issue's table
    ("exact", None, None, 1, 1, 0, None, None),
    ("hot", 4, "hadamard", 16, 8, 0, 8, 8),
    ("hot-unbiased", 4, "hadamard", 16, 8, 4, 8, 8),
    ("hla", None, "hadamard", 16, 8, 0, None, None),
    ("hq", 4, "hadamard", 16, 16, 0, 8, 8),
    ("hq8", 8, "hadamard", 16, 16, 0, 8, 8),
    ("hq4", 4, "hadamard", 16, 16, 0, 8, 4),
    ("hot-importance", 4, "hadamard", 16, 16, 0, 8, 4),
    ("lbp-wht", None, "lowpass", 64, 21, 0, None, None),
    ("luq", 4, None, 1, 1, 0, 4, 4),
    ("int4", 4, None, 1, 1, 0, 4, 4),
    ("dropout", None, None, 1, 1, 0, None, None),
]


def test_in_fp8_the_default_is_full_rank_hot_with_everything_compressed() -> None:
    """What was recorded of the one speaks for the other (``hotrain:hq:number=e4m3+memory=block``)."""
    mine, recorded = hotrain.preset(DEFAULT, number="e4m3"), hotrain.preset("hq", number="e4m3", memory="block")
    assert replace(mine, name="hq") == recorded


@pytest.mark.parametrize("row", PATHS, ids=[row[0] for row in PATHS])
def test_presets_hold_what_their_papers_say(row: tuple) -> None:
    method = hotrain.preset(row[0])
    g_x, g_w = method.grad_input, method.grad_weight
    got = (g_x.bits, g_x.transform, g_w.tile, g_w.rank, g_w.sampled, g_w.bits, method.saved.bits)
    assert got == row[1:]


FP8 = [("hot", "P8of16"), ("hot-unbiased", "P4+4of16"), ("hq", "H16"), ("hq8", "H16")]


def test_scales_of_outputs() -> None:
    """In integers alone, and not beside x with scales of rows, which are folded into the same codes."""
    assert hotrain.preset("hq8").grad_weight.scale == "column"
    assert hotrain.preset("hq8", number="e4m3").grad_weight.scale == "tensor"
    assert hotrain.preset("hq8", saved_bits=4).grad_weight.scale == "tensor"
    with pytest.raises(ValueError, match=r"mine: g_w:int8/column with saved:int4/row is not defined.*scale='tensor'"):
        Method("mine", grad_weight=GradWeight(bits=8, scale="column"), saved=Saved(bits=4, scale="row"))
    with pytest.raises(
        ValueError, match="number='luq' with scale='column' is not defined; accepted are scale='tensor'"
    ):
        GradWeight(bits=4, number="luq", scale="column")
    with pytest.raises(ValueError, match="number='e4m3' with scale='column'"):
        GradWeight(bits=8, number="e4m3", rounding="nearest", scale="column")


@pytest.mark.parametrize("number", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("name", "rows"), FP8)
def test_fp8_in_place_of_integers(name: str, rows: str, number: str) -> None:
    """g_y of both paths in that number, what is kept in e4m3, no rotation; a value like every method."""
    method = hotrain.preset(name, number=number)
    memory = "" if method.memory == "linear" else f"  memory:{method.memory}"
    assert str(method) == f"{name}  g_x:{number}  g_w:{rows}·{number}  saved:e4m3{memory}"
    assert method == hotrain.preset(name).override(number=number) == method.override(number=number)
    assert pickle.loads(pickle.dumps(method)) == method
    assert (method.grad_input.bits, method.grad_weight.bits, method.saved.bits) == (8, 8, 8)
    assert method.grad_input.scale_axis == "tensor"
    assert method.compresses
    assert not method.is_exact
    assert hotrain.preset(name, number="int").grad_weight.number == "int"


OURS = ("hq8", "hot-unbiased", "hot-importance")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OURS])
def test_what_was_published_is_the_same_on_every_device(name: str) -> None:
    method = hotrain.preset(name)
    assert not method.automatic
    assert method.on_device(fp8=True) is method


@pytest.mark.parametrize("name", OURS)
def test_our_own_methods_take_the_numbers_of_the_device(name: str) -> None:
    method = hotrain.preset(name)
    assert method.on_device(fp8=True) == hotrain.preset(name, number="e4m3")
    assert method.on_device(fp8=False) == hotrain.preset(name, number="int")
    assert hotrain.preset(name, number="int").on_device(fp8=True) == hotrain.preset(name, number="int")
    assert hotrain.preset(name, number="int").override(number="auto") == method
    assert hotrain.preset("hot", number="auto").on_device(fp8=True) == hotrain.preset("hot", number="e4m3")


@pytest.mark.parametrize(
    ("overrides", "chooses"),
    [
        ({"rank": 4}, True),  # both numbers have rows
        ({"scale": "token"}, True),  # a calibration's; fp8 has one scale anyway
        ({"grad_input_bits": 4}, False),  # fp8 has eight
        ({"rounding": "nearest"}, False),
        ({"saved_bits": 4}, False),
    ],
)
def test_who_sets_bits_means_integers(overrides: dict[str, object], chooses: bool) -> None:
    method = hotrain.preset("hq8", **overrides)
    assert method.automatic == chooses
    assert (method.on_device(fp8=True).grad_weight.number == "e4m3") == chooses


def test_the_choice_needs_something_to_choose() -> None:
    with pytest.raises(ValueError, match="hla: number='auto' does not concern it"):
        hotrain.preset("hla", number="auto")
    with pytest.raises(ValueError, match="number='auto' chooses between integers and fp8"):
        hotrain.preset("hot", saved_bits=None, number="auto")


@pytest.mark.parametrize(("name", "rows"), [("hq4", "H16"), ("hot-importance", "H16"), ("hot", "P8of16")])
def test_four_bits_of_x_stay_beside_fp8(name: str, rows: str) -> None:
    """Integers up to 7 are numbers of e4m3: x keeps its codes, their scales per row and their rounding."""
    method = hotrain.preset(name, saved_bits=4).override(number="e4m3")
    share = "·share0.5" if name == "hot-importance" else ""
    assert str(method) == f"{name}  g_x:e4m3  g_w:{rows}·e4m3{share}  saved:int4/row"
    assert method.saved == hotrain.preset(name, saved_bits=4).saved
    assert method.draws
    codes = torch.arange(-7, 8)
    assert torch.equal(codes.float().to(torch.float8_e4m3fn).float(), codes.float())


def test_fp8_draws_its_rows_and_nothing_else() -> None:
    """It rounds to nearest: only drawn rows need a key."""
    assert [name for name, _ in FP8 if hotrain.preset(name, number="e4m3").draws] == ["hot-unbiased"]


def test_fp8_with_other_rows() -> None:
    method = hotrain.preset("hot-unbiased", number="e4m3", rank=6, sampled=2, order="sequency")
    assert str(method) == "hot-unbiased  g_x:e4m3  g_w:P4+2of16/sequency·e4m3  saved:e4m3"
    assert method == hotrain.preset("hot-unbiased", rank=6, sampled=2, order="sequency").override(number="e4m3")
    other = method.override(number="e5m2")
    assert (other.grad_input.number, other.grad_weight.number, other.saved.number) == ("e5m2", "e5m2", "e4m3")


def test_an_fp8_scale_that_nobody_chose_is_one_for_the_tensor() -> None:
    """The rotated form, which no override makes, is a path like any other."""
    path = GradInput("hadamard", bits=8, number="e4m3", rounding="nearest")
    assert str(path) == "g_x:H16·e4m3"
    assert path.scale == "auto"
    assert path.scale_axis == "tensor"


@pytest.mark.parametrize("saved", [Saved(bits=8), Saved(bits=8, scale="row"), Saved(bits=4, number="sawb")], ids=str)
def test_integers_times_fp8_is_not_defined(saved: Saved) -> None:
    with pytest.raises(ValueError, match=r"mine: a product of g_w:e4m3 with saved:.*or integers of 4 bits for saved"):
        Method("mine", grad_weight=GradWeight(bits=8, number="e4m3", rounding="nearest"), saved=saved)
    with pytest.raises(ValueError, match=r"mine: a product of g_w:int8 with saved:e4m3"):
        Method("mine", grad_weight=GradWeight(bits=8), saved=Saved(bits=8, number="e4m3"))
    # Where one of the two is in floating point there is no product of codes.
    Method("mine", grad_weight=GradWeight(bits=8, number="e4m3", rounding="nearest"))
    Method("mine", saved=Saved(bits=8, number="e4m3"))


def test_only_exact_is_exact() -> None:
    assert [name for name in NAMES if hotrain.preset(name).is_exact] == ["exact"]


def test_an_override_reaches_its_field() -> None:
    method = hotrain.preset(
        "hot-unbiased",
        rank=6,
        sampled=2,
        order="sequency",
        grad_input_bits=8,
        grad_weight_bits=None,
        saved_bits=None,
        scale="tensor",
        rounding="pseudo",
    )
    assert (method.grad_weight.rank, method.grad_weight.sampled, method.grad_weight.order) == (6, 2, "sequency")
    assert (method.grad_input.bits, method.grad_weight.bits, method.saved.bits) == (8, None, None)
    assert method.grad_input.scale == "tensor"
    assert {method.grad_input.rounding, method.grad_weight.rounding, method.saved.rounding} == {"pseudo"}
    assert method.name == "hot-unbiased"


@pytest.mark.parametrize("forward", ["fp8", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_takes_a_forward_product(name: str, forward: str) -> None:
    """It concerns y alone: both paths, what is kept and whether numbers are drawn stay; it prints, and is undone."""
    method, plain = hotrain.preset(name, forward=forward), hotrain.preset(name)
    assert (method.forward, plain.forward) == (forward, "exact")
    assert replace(method, forward="exact") == method.override(forward="exact") == plain
    assert str(method).startswith(f"{name}  y:{forward}  g_x:")
    assert not method.is_exact
    assert (method.draws, method.compresses) == (plain.draws, plain.compresses)
    assert method == plain.override(forward=forward)
    assert pickle.loads(pickle.dumps(method)) == method


def test_a_forward_product_goes_with_other_overrides() -> None:
    method = hotrain.preset("hot-unbiased", forward="fp8", number="e4m3", rank=6)
    assert str(method) == "hot-unbiased  y:fp8  g_x:e4m3  g_w:P3+3of16·e4m3  saved:e4m3"
    assert method == hotrain.preset("hot-unbiased", rank=6, number="e4m3").override(forward="fp8")


def test_an_override_leaves_its_arguments_alone() -> None:
    """`override` of a method shared by many layers is called with one dictionary after another."""
    turned = {"forward": "int8", "rank": 4}
    assert hotrain.preset("hot", **turned) == hotrain.preset("hot", **turned)
    assert turned == {"forward": "int8", "rank": 4}


def test_preset_and_override_agree() -> None:
    assert hotrain.preset("hot", rank=4) == hotrain.preset("hot").override(rank=4)


@pytest.mark.parametrize(
    ("rank", "sampled"),
    [(16, 8), (8, 4), (6, 3), (4, 2), (2, 1), (1, 1)],
    ids=lambda v: str(v),
)
def test_a_new_rank_keeps_the_share_of_drawn_rows(rank: int, sampled: int) -> None:
    """At every rank a method that draws still draws: hot-unbiased without a drawn row would be biased."""
    assert hotrain.preset("hot-unbiased", rank=rank).grad_weight.sampled == sampled
    assert hotrain.preset("hot", rank=rank).grad_weight.sampled == 0


def test_four_saved_bits_come_with_a_scale_a_row_and_unbiased_rounding() -> None:
    saved = hotrain.preset("hot-unbiased", saved_bits=4).saved
    assert (saved.bits, saved.scale, saved.rounding) == (4, "row", "stochastic")
    assert hotrain.preset("hot-unbiased", saved_bits=4, rounding="nearest").saved.rounding == "nearest"


@pytest.mark.parametrize("name", NAMES)
def test_overriding_with_a_methods_own_values_changes_nothing(name: str) -> None:
    method = hotrain.preset(name)
    own = {
        "rank": method.grad_weight.rank,
        "sampled": method.grad_weight.sampled,
        "order": method.grad_weight.order,
        "grad_input_bits": method.grad_input.bits,
        "grad_weight_bits": method.grad_weight.bits,
        "saved_bits": method.saved.bits,
        "scale": method.grad_input.scale,
        "number": "auto" if method.automatic else method.grad_weight.number,
    }
    for knob in own.keys() & method.knobs:
        assert method.override(**{knob: own[knob]}) == method, knob


BAD = [
    # (preset, override, what the message must name)
    ("hot", {"rank": 0}, ("rank", "0", "1 to 16")),
    ("hot", {"rank": 17}, ("rank", "17", "1 to 16")),
    ("hot", {"rank": 8.0}, ("rank", "8.0", "integer")),
    ("hot", {"rank": True}, ("rank", "True", "integer")),
    ("hot", {"sampled": 9}, ("sampled", "9", "0 to 8")),
    ("hot", {"sampled": -1}, ("sampled", "-1", "0 to 8")),
    ("hot", {"order": "zigzag"}, ("order", "'zigzag'", "lp_l1", "sequency", "auto")),
    ("hot", {"grad_input_bits": 3}, ("grad_input_bits", "3", "4", "8", "None")),
    ("hot", {"grad_input_bits": 0}, ("grad_input_bits", "0", "None")),
    ("hot", {"grad_input_bits": 4.0}, ("grad_input_bits", "4.0", "None")),
    ("hot", {"grad_weight_bits": 16}, ("grad_weight_bits", "16", "None")),
    ("hot", {"saved_bits": "8"}, ("saved_bits", "'8'", "None")),
    ("hot", {"scale": "row"}, ("scale", "'row'", "tensor", "token", "auto")),
    ("hot", {"rounding": "down"}, ("rounding", "'down'", "stochastic", "nearest", "pseudo")),
    ("hot", {"bits": 4}, ("bits", "rank", "scale", "forward")),  # unknown: the known ones are listed
    ("hot", {"forward": "int4"}, ("forward", "'int4'", "exact", "fp8", "int8")),
    ("exact", {"forward": None}, ("forward", "None", "exact")),
    ("exact", {"rank": 4}, ("rank", "4", "none")),  # known, but concerns nothing here
    ("lbp-wht", {"saved_bits": 8}, ("saved_bits", "8", "order, rank")),
    ("luq", {"grad_input_bits": 8}, ("grad_input_bits", "8", "none")),
    ("hot", {"share": 0}, ("share", "0", "(0, 1]")),
    ("hot", {"share": 1.5}, ("share", "1.5", "(0, 1]")),
    ("hot", {"number": "fp8"}, ("number", "'fp8'", "int", "e4m3", "e5m2")),
    ("hot", {"number": None}, ("number", "None", "e4m3")),
    ("hla", {"number": "e4m3"}, ("number", "'e4m3'", "its overrides")),  # no codes
    # fp8 says bits, scale and rounding itself
    ("hot", {"number": "e4m3", "rounding": "stochastic"}, ("hot in fp8", "rounding", "number, order, rank, sampled")),
    ("hot", {"number": "e4m3", "grad_input_bits": 4}, ("hot in fp8", "grad_input_bits", "4")),
    ("hot", {"saved_bits": 4, "number": "e5m2"}, ("hot in fp8", "saved_bits", "4")),
    ("hot", {"scale": "token", "number": "e4m3"}, ("hot in fp8", "scale", "'token'")),
]


@pytest.mark.parametrize(("name", "overrides", "named"), BAD, ids=[f"{n}-{o}" for n, o, _ in BAD])
def test_a_bad_override_names_field_value_and_what_is_allowed(name: str, overrides: dict, named: tuple) -> None:
    with pytest.raises(ValueError, match=name) as error:
        hotrain.preset(name, **overrides)
    for fragment in named:
        assert fragment in str(error.value)


@pytest.mark.parametrize("bits", ["grad_input_bits", "grad_weight_bits", "saved_bits"])
def test_fp8_needs_codes_everywhere(bits: str) -> None:
    with pytest.raises(ValueError, match="hot: number='e4m3' needs codes on both paths and of what is kept, got"):
        hotrain.preset("hot", **{bits: None}).override(number="e4m3")


def test_there_is_no_way_back_from_fp8() -> None:
    """The bits and the rounding of the preset are gone: said, not guessed."""
    with pytest.raises(ValueError, match=r"hot in fp8: number='int' .* start from preset\('hot'\)"):
        hotrain.preset("hot", number="e4m3").override(number="int")


def test_an_unknown_preset_names_the_known_ones_and_a_near_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'hot-unbiased'") as error:
        hotrain.preset("hot_unbiased")
    for name in NAMES:
        assert name in str(error.value)


BAD_PARTS = [
    (GradInput, {"transform": "dct"}, "transform='dct'"),
    (GradInput, {"bits": 5}, "bits=5"),
    (GradInput, {"transform": "lowpass", "bits": 4}, "bits=None"),
    (GradInput, {"number": "luq", "bits": 8}, "bits=4"),  # eight levels of powers of two are 4 bits
    (GradInput, {"number": "luq", "bits": 4, "transform": "hadamard"}, "transform=None"),
    (GradInput, {"weight_scale": "token"}, "weight_scale='token'"),
    (GradWeight, {"tile": 32}, "tile=32"),
    (GradWeight, {"tile": 16, "rank": 17}, "rank=17"),
    (GradWeight, {"tile": 16, "rank": 8, "sampled": 9}, "sampled=9"),
    (GradWeight, {"drop": 1.0}, "drop=1.0"),
    (GradWeight, {"drop": -0.1}, "drop=-0.1"),
    (GradWeight, {"number": "luq", "bits": 8}, "bits=4"),
    (Saved, {"bits": 2}, "bits=2"),
    (Saved, {"scale": "token"}, "scale='token'"),
    (Saved, {"number": "sawb", "bits": 8}, "bits=4"),  # SAWB's coefficients hold for 4 bits
    (GradInput, {"number": "e4m3", "bits": 4, "rounding": "nearest"}, "number='e4m3' with bits=4 .* bits=8"),
    (GradInput, {"number": "e4m3", "rounding": "nearest"}, "bits=None .* bits=8"),
    (GradInput, {"number": "e5m2", "bits": 8}, "rounding='stochastic' .* rounding='nearest'"),
    (
        GradInput,
        {"number": "e4m3", "bits": 8, "rounding": "nearest", "scale": "token"},
        "scale='token' is not .* scale='tensor'",
    ),
    (
        GradInput,
        {"number": "e4m3", "bits": 8, "rounding": "nearest", "weight_scale": "column"},
        "'column' is not .* weight_scale='tensor'",
    ),
    (GradInput, {"number": "e4m3", "bits": 8, "rounding": "nearest", "weight_rounding": "pseudo"}, "'pseudo' .*near"),
    (GradWeight, {"number": "e5m2", "bits": 4, "rounding": "nearest"}, "bits=4 .* bits=8"),
    (GradWeight, {"number": "e4m3", "bits": 8}, "rounding='stochastic' .* rounding='nearest'"),
    (Saved, {"number": "e5m2", "bits": 8}, "'e5m2' is not one of 'int', 'e4m3', 'sawb'"),
    (Saved, {"number": "e4m3", "bits": 8, "scale": "row"}, "scale='row' .* scale='tensor'"),  # it would not fold
    (Saved, {"number": "e4m3", "bits": 4}, "bits=4 .* bits=8"),
    (Saved, {"number": "e4m3", "bits": 8, "rounding": "stochastic"}, "rounding='stochastic' .* rounding='nearest'"),
]


@pytest.mark.parametrize(
    ("part", "fields", "named"), BAD_PARTS, ids=[f"{part.__name__}-{named}" for part, _, named in BAD_PARTS]
)
def test_the_parts_check_themselves_when_built(part: type, fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        part(**fields)


def test_a_lowpass_g_x_needs_rows() -> None:
    with pytest.raises(ValueError, match="mine"):
        Method("mine", GradInput("lowpass"), GradWeight(tile=1))


@pytest.mark.parametrize("name", NAMES)
def test_draws_says_whether_random_numbers_are_needed(name: str) -> None:
    """A method that says no keeps no key for backward; it must then not ask for one."""
    expected = {"hot", "hot-unbiased", "hq", "hq8", "hq4", "hot-importance", "luq", "dropout"}
    assert hotrain.preset(name).draws == (name in expected)


def test_rounding_to_nearest_everywhere_draws_nothing() -> None:
    method = hotrain.preset("hot", rounding="nearest")
    assert not method.draws
    assert hotrain.preset("hot-unbiased", rounding="nearest").draws  # its rows and its weight still do


def test_the_knobs_are_the_issues() -> None:
    words = "rank sampled share order grad_input_bits grad_weight_bits saved_bits scale rounding number"
    assert frozenset(words.split()) == KNOBS


def test_auto_scale_is_a_scale_a_token_until_calibrated() -> None:
    path = hotrain.preset("hot").grad_input
    assert path.scale == "auto"
    assert path.scale_axis == "token"
    assert replace(path, scale="tensor").scale_axis == "tensor"
