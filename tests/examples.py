"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings


def examples(daily: int, nightly: int) -> int:
    """`daily` for the same examples as ever, `nightly` where they are drawn anew (`make test-nightly`)."""
    return nightly if settings.get_current_profile_name() == "nightly" else daily
