"""A Megatron job that is only planned, from flags or from the words of a launch command. No torch.

``job`` reads the sizes and gives the plan, ``traffic`` says what each of Megatron's dims sends, and
``checks`` which placements are expensive. The command line is their user.
"""
