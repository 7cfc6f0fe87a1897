"""Pre-training of the base models and judges of the small worlds, and the testbed's true clips."""
