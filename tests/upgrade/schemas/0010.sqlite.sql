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
	PRIMARY KEY (name)
);
INSERT INTO alembic_version VALUES ('0010');
