"""One training in one supervised process: how it starts, is watched and ends, and its files."""
