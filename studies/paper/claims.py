"""All claims, in the order of the page."""

from studies.paper import adapter, comparisons, compute, gradients, printed, samplers

CLAIMS = (
    *samplers.CLAIMS,
    *gradients.CLAIMS,
    *printed.CLAIMS,
    *comparisons.CLAIMS,
    *adapter.CLAIMS,
    *compute.CLAIMS,
)
