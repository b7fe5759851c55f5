"""Steps of a sequence: who may take one, and the threads that compute it."""
