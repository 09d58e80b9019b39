"""The question ``train-overlap``: what a train pipeline hides of a slow loader and slow rows."""
