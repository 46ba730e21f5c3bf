"""What the requests to block devices say: latencies, anomalies, figures, a report."""
