"""Tuned constants. Changing one changes speed or memory, and no number beyond rounding.

All were measured on the networks of ``benchmarks/core.py`` and ``benchmarks/peers.py``.
"""

# -- algebra -------------------------------------------------------------------------------------

# Per-sample gradients of one layer are formed in blocks of about this many entries. A block must
# still be in the cache when it is squared: one block of all samples is three times slower.
BLOCK_ENTRIES = 1 << 20
# Jacobians are widened to float64 in blocks of about this many entries, for the same reason.
SPECTRUM_BLOCK_ENTRIES = 1 << 18
# A block of a weight's gradient has at least this many inputs: products with thinner matrices wait
# for memory.
FEWEST_BLOCK_INPUTS = 128

# -- buffers -------------------------------------------------------------------------------------

LARGEST_BUFFER_LEFT_BYTES = 4 << 20  # of the buffers that stay allocated
MOST_BUFFER_BYTES_LEFT = 32 << 20  # buffers that stay allocated between two measurements
# What the C library of Linux keeps for the next call: freed blocks below a size (at most 32 MiB are
# allowed), and free memory at the end of its heap.
LARGEST_KEPT_BLOCK_BYTES = 30 << 20
KEPT_HEAP_BYTES = 256 << 20

# -- chunks of samples ---------------------------------------------------------------------------

CHUNK_BYTES = 128 << 20  # default working memory of one chunk; more is slower
SHARPNESS_CHUNK_BYTES = 48 << 20  # default working memory of one chunk for sharpness alone
FEWEST_SAMPLES, SHARPNESS_FEWEST_SAMPLES = 8, 5  # per chunk, if they fit MOST_CHUNK_BYTES
MOST_CHUNK_BYTES = 1 << 28
MOST_SAMPLES, SHARPNESS_MOST_SAMPLES = 100, 256  # dense products of 200 to 400 rows are fastest
# Where memory allows fewer samples than this, sharpness alone keeps fewer rows at a time instead.
ENOUGH_SAMPLES = 8
PRODUCTS_AT_ONCE = 10  # of sharpness alone: rows kept together; more take memory, no less time

# -- batched vector-Jacobian products ------------------------------------------------------------

# A dense network with at least MANY_PRODUCTS outputs and at most FEW_SAMPLES samples is asked for
# products in batches of BATCHED_ROWS rows. For fewer products the imports of torch at the first
# batched call (0.3 s) take longer than they save.
MANY_PRODUCTS, FEW_SAMPLES, BATCHED_ROWS = 64, 32, 256

# -- exact or sketched ---------------------------------------------------------------------------

ALWAYS_EXACT = 64  # up to this many products the exact pass is always run
# Above this many pairs of outputs (10,000 outputs) "auto" does not use a narrow head, because its
# exact pass holds one number for each pair.
MOST_PAIRS_OF_OUTPUTS = 10**8
TIMES_DEARER = 4  # an exact pass may cost this many times a sketch before the sketch is chosen
SKETCH_ROWS = 4  # a second derivative takes the memory of this many rows of all layers
LAYER_PRODUCTS = 5  # cost of a layer's Lanczos and moments, in products with all their algebra
SPECTRA_DOUBLE = 1000  # number of products at which spectra cost as much as the products

# -- half precision ------------------------------------------------------------------------------

# Half-precision parameters up to this many bytes are copied to float32. Larger models are widened
# layer by layer: no copy, but every product widens its weight again.
LARGEST_COPIED_BYTES = 64 << 20
