"""What a plan or a dump means: counts, traffic, checks, differences. No torch."""
