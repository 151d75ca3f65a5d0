"""Failures of the suite say what the values were, as those of any test."""

import pytest

pytest.register_assert_rewrite("dagresume.contracts")
