def showcase(*a): pass
