"""A dataset as a map of two dimensions: features, projected, on a page with thumbnails, colours and selections."""

PROJECTIONS = ("pca", "umap", "tsne")  # names for the help, without importing NumPy
THUMBNAIL_SIZES = (128, 96, 64, 48, 32)  # pixels; multiples of 16, the blocks of WebP and JPEG
