"""Where a token stands, as attention sees it: rotations of q and k, and factors on q. Functions of positions alone."""
