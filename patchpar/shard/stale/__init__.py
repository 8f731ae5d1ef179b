"""Values of the last step: held, sent on, corrected, extrapolated."""
