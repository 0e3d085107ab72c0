"""A Megatron job that is only planned, from flags or from the words of a launch command. No torch.

``job`` reads the sizes and gives the plan, ``layouts`` says which groups its layouts have and which
dims cut weights, ``orders`` ranks orders of dims, and ``checks`` finds expensive placements. The
command line is their user.
"""
