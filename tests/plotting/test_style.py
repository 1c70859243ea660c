"""plotting/style.py: every method of a page can be told from every other."""

from __future__ import annotations

import hotrain
from hotrain.plotting.style import css_variables, looks


def test_every_preset_and_a_few_variants_have_looks_of_their_own() -> None:
    methods = [*hotrain.presets(), "exact:memory=block", "hot:rank=4", "hot:rank=2", "mine"]
    found = looks(methods)
    assert list(found) == methods
    for preset in hotrain.presets():
        assert found[preset].name == preset
    for sign in ("name", "light", "dark"):
        assert len({getattr(look, sign) for look in found.values()}) == len(methods), sign
    drawn = {(look.dash if isinstance(look.dash, str) else look.dash[1], look.marker) for look in found.values()}
    assert len(drawn) == len(methods), "colour is not the only sign"


def test_a_file_brings_the_colours_that_it_uses_only() -> None:
    assert css_variables("light", "fill:var(--m-hot)") == "--m-hot:#d0510a;"
    assert "--m-hot-unbiased:" in css_variables("light")
