"""Tools around a run: the plan, the doctor, and the operators as a table."""
