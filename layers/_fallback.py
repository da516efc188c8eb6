"""`eqxcute._fallback`, which pointwise functions need too, under the name that the layers know."""

import sys

from eqxcute import _fallback
from eqxcute._fallback import (
    Implementation as Implementation,
    check_name as check_name,
    choose as choose,
    platform as platform,
)

sys.modules[__name__] = _fallback  # the module itself: it holds what has been warned of
