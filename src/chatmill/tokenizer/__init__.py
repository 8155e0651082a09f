"""Text to ids: vocabularies of every kind behind one protocol, with fast engines checked against a reference."""
