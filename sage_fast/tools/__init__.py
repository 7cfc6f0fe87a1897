"""Tools around a run: the plan, the profile, the doctor, and the samplers as a table."""
