"""From plans to the files of a package: filled templates, hashes, an all-or-nothing write."""
