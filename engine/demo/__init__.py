"""The embedded demo model: its chat template, its 4-bit checkpoint and, in ``recipe``, how it was made."""
