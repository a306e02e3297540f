"""Trainings in fresh, supervised processes: trials, A/Bs, climbs, tunings."""
