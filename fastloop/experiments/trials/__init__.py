"""One training in one supervised process: starting it, watching it, ending it, its files."""
