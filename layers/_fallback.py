"""`eqxcute._fallback`, which pointwise functions need too, under the name that the layers know."""

import sys

from eqxcute import _fallback

sys.modules[__name__] = _fallback  # the module itself: it holds what has been warned of
