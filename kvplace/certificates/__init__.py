"""The certificates of an installation, made and renewed in the cluster by kvplace itself."""
