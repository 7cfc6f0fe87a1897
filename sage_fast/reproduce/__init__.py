"""`sage-fast reproduce`: the claims of the paper and questions beyond it, on the testbed, with seeds and intervals."""
