"""What the tests of the Helm chart and of the images are made of: helm, Kubernetes' schemas, and pods as processes."""
