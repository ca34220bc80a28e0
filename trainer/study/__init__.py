"""A study: one recipe under several corrections, rollout precisions and seeds, compared on one page."""
