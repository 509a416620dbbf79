"""A terminal kept as a moving picture."""

from __future__ import annotations

import pytest

from minillm.bench.film import LAST_SECONDS, LONGEST_SECONDS, Film


@pytest.fixture
def film():
    times = iter([0.0, 0.05, 0.2, 9.0])
    film = Film(clock=lambda: next(times))
    for text in ("one", "one and a half", "two\n██ and more", "three"):
        film.keep(text)
    return film


def test_frames_that_follow_soon_replace_each_other_and_long_waits_are_cut(film):
    assert [text for _, text in film.frames] == ["one and a half", "two\n██ and more", "three"]
    assert film.durations() == [0.2, LONGEST_SECONDS, LAST_SECONDS]


def test_the_file_plays_every_frame_for_its_time(film, tmp_path):
    from PIL import Image

    moving = Image.open(film.save(tmp_path / "film.gif"))
    assert moving.n_frames == 3
    for frame, seconds in enumerate(film.durations()):
        moving.seek(frame)
        assert moving.info["duration"] == 1000 * seconds
    moving.seek(1)
    assert (0, 114, 178) in [colour for _, colour in moving.convert("RGB").getcolors(999)]  # the bars
    moving.seek(2)
    assert (0, 114, 178) not in [colour for _, colour in moving.convert("RGB").getcolors(999)]


def test_no_frame_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no frame was kept"):
        Film().save(tmp_path / "film.gif")
