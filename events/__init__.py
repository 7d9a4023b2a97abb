"""The log: subjects, envelope, codec, streams, appending, following, beacons. The only importer of nats."""
