"""All claims, in the order of the page."""

from sage_fast.reproduce import adapter, comparisons, compute, gradients, printed, samplers

CLAIMS = (
    *samplers.CLAIMS,
    *gradients.CLAIMS,
    *printed.CLAIMS,
    *comparisons.CLAIMS,
    *adapter.CLAIMS,
    *compute.CLAIMS,
)
