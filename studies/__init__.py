"""Studies: what trains, plots and models beyond what an operator asks. They import the packages, and ship in no wheel."""
