DROP INDEX windows_with_candidates;
CREATE TABLE stores (
	name VARCHAR(255) NOT NULL,
	url VARCHAR(255) NOT NULL,
	boot_id VARCHAR(255) NOT NULL,
	version VARCHAR(255) NOT NULL,
	first_seen DATETIME NOT NULL,
	last_seen DATETIME NOT NULL,
	status JSON NOT NULL,
	tuning JSON NOT NULL,
	pending_bypass BOOLEAN,
	expected JSON,
	expected_at DATETIME,
	differs_since DATETIME,
	summed_until DATETIME,
	folded_until DATETIME,
	candidates JSON,
	PRIMARY KEY (name)
);
CREATE TABLE windows (
	id INTEGER NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	model VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	start DATETIME NOT NULL,
	seconds DOUBLE NOT NULL,
	counters JSON NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO alembic_version VALUES ('0012');
