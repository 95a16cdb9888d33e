"""Why a VM fits no node, what would make it fit, and how one that runs sits on its machine."""
