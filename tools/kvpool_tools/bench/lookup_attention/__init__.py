"""Speed of compute by lookup (`kvpoolctl bench sparse`): one decoding step against full attention and against plain reading."""
