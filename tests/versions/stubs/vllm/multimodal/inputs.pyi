class PlaceholderRange:
    length: int
    offset: int

class MultiModalFeatureSpec:
    identifier: str
    mm_position: PlaceholderRange
