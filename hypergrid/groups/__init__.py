"""Live process groups: nothing else creates or closes one."""
