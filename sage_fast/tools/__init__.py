"""Tools around a run: the plan, the profile, the doctor, and the operators as a table."""
