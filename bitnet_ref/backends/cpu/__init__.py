"""The compiled CPU backend: weight layouts, blocks of fused kernels, replayed decoding steps.

May import `reference`, `system` and the other modules of `backends`, but not `cuda`."""
