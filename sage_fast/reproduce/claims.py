"""All claims, in the order of the page."""

from sage_fast.reproduce import comparisons, compute

CLAIMS = (*comparisons.CLAIMS, *compute.CLAIMS)
