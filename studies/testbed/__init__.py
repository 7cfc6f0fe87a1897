"""Pre-training of the base models and judges of the small worlds, and distances to the testbed's true clips."""
