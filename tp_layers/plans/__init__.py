"""What a plan is, how it is checked, and the plans of the models the package knows."""
