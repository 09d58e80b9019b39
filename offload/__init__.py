"""Models larger than memory: shards rest at home and stream to the compute device ahead of use."""
