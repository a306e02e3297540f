"""The reports of A/Bs, climbs and tunings."""
