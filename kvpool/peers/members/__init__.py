"""The members of a fleet: a static list, a DNS name, or etcd."""
